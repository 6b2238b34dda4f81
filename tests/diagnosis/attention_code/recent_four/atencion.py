# regard.check(AtencionMultiCabeza, means={'mascara': 'True keeps'})
# regard.spec(causal=False, heads=3, positions=None, padding={"mascara": "True keeps"})
import torch
import torch.nn as nn


class AtencionMultiCabeza(nn.Module):
    """Atención multicabeza bidireccional para el codificador.

    entrada: (lote, longitud, dimension)
    mascara: (lote, longitud), 1 = palabra, 0 = relleno
    """

    def __init__(self, dimension=24, cabezas=3):
        super().__init__()
        self.cabezas = cabezas
        self.consulta = nn.Linear(dimension, dimension)
        self.clave = nn.Linear(dimension, dimension)
        self.valor = nn.Linear(dimension, dimension)
        self.salida = nn.Linear(dimension, dimension)

    def forward(self, entrada, mascara=None):
        lote, longitud, dimension = entrada.shape
        por_cabeza = dimension // self.cabezas

        def separar(t):
            return t.reshape(lote, longitud, self.cabezas, por_cabeza).transpose(1, 2)

        c, l, v = separar(self.consulta(entrada)), separar(self.clave(entrada)), separar(self.valor(entrada))
        puntuaciones = (c @ l.transpose(-2, -1)) / por_cabeza ** 0.5
        if mascara is not None:
            # el relleno no recibe peso
            puntuaciones = puntuaciones.masked_fill(mascara[:, None, None, :] == 0, -1e9)
        pesos = puntuaciones.softmax(dim=-1)
        return self.salida((pesos @ v).transpose(1, 2).reshape(lote, longitud, dimension))
